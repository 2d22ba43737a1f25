"""A Django project for tests: settings, a URLconf and views. To import it configures Django, once for the process."""

import django
from django import conf

from tests.web.django_site import settings as given

if not conf.settings.configured:
    conf.settings.configure(**{name: value for name, value in vars(given).items() if name.isupper()})
    django.setup()
