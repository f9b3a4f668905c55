"""Everything that training does on a GPU only; `tacit.training` imports it for CUDA tensors only.

- `compiled`: the clipped sum, compiled (`graph_pair`) and replayed as one CUDA graph
  (`graph_replay`), which copies the rows of a lot itself (`take_rows`);
- `recorded_update`: noise and the optimizer's step, recorded as a CUDA graph, in one pass over the
  parameters where that is possible (`update`);
- `noise`, `banded_blocks`: Gaussian noise on many tensors, on a grid, in one launch;
- `gram`, `conv_norms`, `weighted_rows`: fused kernels for per-example norms and sums. Each has a
  plain torch equivalent in `tacit.training.rules`;
- `available`: what of this can be used here. The others of this list but the first two need Triton.

It has no public names: `tacit.training` imports what it needs from these files. This is the only
package that uses private names of torch. Each use has a fallback for versions of torch without that
name.
"""
