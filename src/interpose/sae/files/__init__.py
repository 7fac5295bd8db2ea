"""Files of autoencoders: SAELens's layout to read and to write, and others' to read."""

from interpose.sae.files.loading import load_sae as load_sae
from interpose.sae.files.saelens import save_sae as save_sae
