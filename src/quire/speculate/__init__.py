"""L4: tokens guessed ahead and verified in one step; what comes out is that of plain decoding, bit for bit."""
