from serve_app.extension import Extension
from serve_app.extensions.dashscope import dashscope, tasks

EXTENSION = Extension("dashscope", requires=("realtime",), dialects=(dashscope.DIALECT, tasks.DIALECT))
