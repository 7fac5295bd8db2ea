"""Ready detectors: they keep what they find over as many forward passes as there are, until they are cleared."""
