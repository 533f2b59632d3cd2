"""The pack whose layer is being computed. Attention sets it, the router of the same layer reads it after it.

Recomputation runs the layer again and so sets it again; with several packs in flight the last setter is the right one.
"""

from torch import Tensor

multiplicity: Tensor | None = None
"""float[n]: how many trajectories share each token of the pack, 0 for padding; None: unknown, tokens are not counted."""
