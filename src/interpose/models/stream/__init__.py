"""How blocks read the residual stream and write to it: norms and multipliers as numbers, what each branch adds."""
