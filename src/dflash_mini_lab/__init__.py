"""DFlash Mini Lab: is speculative decoding worth it for this model on this machine?"""

__version__ = "0.8.0"
