"""From rewards on leaves to advantages and per-token credit, and the loss built on them."""
