"""The GPU driver, asked through NVML in a worker process that may hang or crash without harm."""
