"""Where tuned kernels run besides a plain launch; each module is imported by those who need it."""
