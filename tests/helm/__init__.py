import pytest

pytest.register_assert_rewrite("tests.helm.owners")
