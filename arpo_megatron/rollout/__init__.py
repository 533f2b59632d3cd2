"""Growing trees: the SGLang server and its client, the tag protocol, branch policies, the grower and its process."""
