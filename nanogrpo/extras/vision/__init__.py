"""Pictures in prompts: models with a vision encoder (Qwen3-VL). A run that only reads text never
imports this folder. Read next: config.py, processor.py, model.py.
"""
