from kbf.filters.gaussian import (
    ekf as ekf,
    kalman as kalman,
    learned_kalman as learned_kalman,
    moments as moments,
    polar as polar,
    ukf as ukf,
)
