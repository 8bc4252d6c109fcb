"""Fine-tuning by several peers against one process: whole models and LoRA adapters, on conversations."""
