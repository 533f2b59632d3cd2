"""Models as Hugging Face describes them: sizes, safetensors files, parameter names in Megatron, and tiny models.

May import config, hardware and utils; of the packages above, none.
"""
