from serve_app.extension import Extension
from serve_app.extensions.models.model_choice import ModelChoice

EXTENSION = Extension("models", open=lambda context: ModelChoice())
