"""Evaluation of Hugging Face models through the engine and the tools."""
