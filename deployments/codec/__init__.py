"""The codec decoder: frames in, PCM out, on CPUs; and the encoder for reference recordings."""
