"""Other places that metrics are sent to: TensorBoard, W&B, MLflow, Trackio."""
