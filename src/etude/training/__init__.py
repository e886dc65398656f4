"""Trainer, losses, batches, pretraining and fine-tuning."""
