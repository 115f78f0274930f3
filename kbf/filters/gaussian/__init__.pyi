from kbf.filters.gaussian import (
    augmented as augmented,
    count_maps as count_maps,
    ekf as ekf,
    kalman as kalman,
    learned_maps as learned_maps,
    learned_ukf as learned_ukf,
    map_pairs as map_pairs,
    moments as moments,
    polar as polar,
    sensor_laws as sensor_laws,
    start as start,
    ukf as ukf,
)
