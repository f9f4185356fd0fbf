"""Operations on tensors: protocols, and a torch reference of each."""
