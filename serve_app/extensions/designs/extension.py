from serve_app.extension import Extension
from serve_app.extensions.designs import design_routes

EXTENSION = Extension("designs", requires=("voices",), dialects=(design_routes.DIALECT,))
