"""Random weights for a model made by a job (the quickstart, tests), without a download."""

from pathlib import Path


def save_random_weights(directory: Path, *, seed: int, device: str = "cpu") -> None:
    """Write model.safetensors for the config.json in `directory`, drawn by transformers' initialisation.

    Args:
        directory: Hugging Face directory with a config.json.
        seed: determines the draws, for one kind of device.
        device: where to draw; billions of weights need a GPU.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # a bar for one small file would disturb the job's display

    config = AutoConfig.from_pretrained(directory, local_files_only=True)
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
    model.to(config.dtype).save_pretrained(directory)
