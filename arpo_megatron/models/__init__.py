"""Models as Hugging Face describes them: sizes, safetensors files, parameter names in Megatron, and tiny models.

May import `hardware`, `config`, `utils` and `errors`, but not `tasks`.
"""
