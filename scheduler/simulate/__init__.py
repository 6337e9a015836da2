"""The scheduler without sockets and tensors: a fake worker, lossy links, a virtual clock, policies side by side."""
