from serve_app.extension import Extension
from serve_app.extensions.dashscope import dashscope

EXTENSION = Extension("dashscope", requires=("realtime",), dialects=(dashscope.DIALECT,))
