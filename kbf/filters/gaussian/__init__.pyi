from kbf.filters.gaussian import (
    ekf as ekf,
    kalman as kalman,
    moments as moments,
    polar as polar,
    ukf as ukf,
)
