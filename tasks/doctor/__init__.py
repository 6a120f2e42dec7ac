"""What `gleaner doctor` looks at: a machine's GPUs, room and kernels, or a cluster."""
