"""A Hydra app."""

import hydra


@hydra.main(version_base="1.3", config_path="hill", config_name="config")
def main(cfg):
    return 10 - (cfg.x - 3) ** 2


if __name__ == "__main__":
    main()
