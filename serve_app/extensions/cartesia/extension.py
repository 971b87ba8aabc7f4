from serve_app.extension import Extension
from serve_app.extensions.cartesia import cartesia, lexicons

EXTENSION = Extension("cartesia", requires=("voices", "live"), dialects=(cartesia.DIALECT, lexicons.DIALECT))
