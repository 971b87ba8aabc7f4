from serve_app.extension import Extension
from serve_app.extensions.jobs import job_routes

EXTENSION = Extension("jobs", dialects=(job_routes.DIALECT,))
