"""Operations on tensors: the torch reference of each."""
