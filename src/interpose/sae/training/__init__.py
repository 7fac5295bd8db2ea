"""Training of sparse autoencoders on vectors of a store, a live model, or anything that gives them."""
