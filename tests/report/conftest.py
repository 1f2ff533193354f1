from tests.labs.chromium import chromium as chromium
