"""The scheduler process: a pure core that decides which tokens run when and in which blocks, and the loop around it."""
