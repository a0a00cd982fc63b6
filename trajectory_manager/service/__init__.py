"""Operations that take more than one atomic step of the store."""
