"""Operations on tensors: paged attention, norms, matrix products, sampling. Nothing here knows requests or processes."""
