from serve_app.extension import Extension
from serve_app.extensions.models.model_choice import ModelHooks

EXTENSION = Extension("models", hooks=ModelHooks())
