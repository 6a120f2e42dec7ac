"""The examinations of `gleaner doctor`: a machine's GPUs, free space and kernels, or a cluster."""
