"""Programs that a policy wrote, run within limits that the kernel keeps."""
