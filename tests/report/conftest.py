from tests.lab.chromium import chromium as chromium
