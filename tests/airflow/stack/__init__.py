"""A package, so that its tests share a stack that ends with them."""
