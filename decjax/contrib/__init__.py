"""Parts that few runs need, imported only when a config or command asks for them."""
