"""Where questions come from: data sets as `Task` records, tokenizers, demonstrations and the resumable sampler."""
