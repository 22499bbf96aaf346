"""Where metrics go beside the run directory's own files: TensorBoard, W&B, MLflow, Trackio."""
