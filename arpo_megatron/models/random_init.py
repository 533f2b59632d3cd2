"""Random weights for a model made on the spot (the quickstart, tests): nothing is downloaded."""

from pathlib import Path


def save_random_weights(directory: Path, *, seed: int, device: str = "cpu") -> None:
    """Write model.safetensors for the config.json in `directory`, drawn by transformers' own initialisation.

    Args:
        directory: Hugging Face directory with a config.json.
        seed: the draws follow from it and the kind of device.
        device: where they are drawn: billions of them take a GPU.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # a bar for one small file would only disturb the job's own display

    config = AutoConfig.from_pretrained(directory, local_files_only=True)
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
    model.to(config.dtype).save_pretrained(directory)
