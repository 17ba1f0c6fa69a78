"""What a run may add around its transport: faults, secure sums, noise, a tree. The loop names none of them."""
