"""Models and data sets by their ids on the Hugging Face Hub, through its cache; the only user of huggingface_hub.

A token comes from HF_TOKEN or from `hf auth login`, as huggingface_hub reads it; nothing here sees or keeps one.
"""
