from kbf.filters.gaussian import (
    ekf as ekf,
    kalman as kalman,
    learned_maps as learned_maps,
    learned_ukf as learned_ukf,
    moments as moments,
    polar as polar,
    start as start,
    ukf as ukf,
)
