BEGIN TRANSACTION;
CREATE TABLE entry (
    id INTEGER PRIMARY KEY,
    time TEXT NOT NULL, kind TEXT NOT NULL CHECK (kind IN ('spend', 'plan', 'steps')),
    partition TEXT NOT NULL, note TEXT NOT NULL, event TEXT, cost TEXT, filter TEXT,
    plan INTEGER REFERENCES entry (id), steps INTEGER NOT NULL, hash TEXT NOT NULL
);
INSERT INTO "entry" VALUES(1,'2026-11-16T19:03:38.246+00:00','spend','','patients by ward','{"noise_multiplier": 8.0, "replace_factor": 2.0, "type": "Gaussian"}','{"renyi": [0.047879795672205176, 0.07592690263728005, 0.03185287740644811, 0.1680816826653832], "gaussian": 0.015625000000015626, "pure": null, "delta": "0"}','{"orders": [6.1286138399136485, 9.718643527853203, 4.07716830394819, 21.514455359654594], "shares": [0.08, 0.04, 0.06, 0.02], "gaussian_share": 0.8, "set_aside": 0.1}',NULL,1,'3c79777bf1f9c1073d1b735a6e8ed5625c02be1de4dbf6358f238ddecc68d630');
INSERT INTO "entry" VALUES(2,'2026-11-16T19:03:38.264+00:00','spend','','training','{"count": 1000, "event": {"event": {"noise_multiplier": 1.1, "replace_factor": 2.0, "type": "Gaussian"}, "rate": 0.01, "type": "PoissonSampled"}, "type": "Repeated"}','{"renyi": [0.4271942799340346, 0.7619693939010018, 0.2722739935791051, 4060.6209728774766], "gaussian": null, "pure": null, "delta": "0"}',NULL,NULL,1,'fd900bb21a5c6346e6fa7ca0e8a3e41f9872e43722421a086f1003ddb8640d30');
INSERT INTO "entry" VALUES(3,'2026-11-16T19:03:38.277+00:00','spend','','mean age','{"noise_multiplier": 10.0, "replace_factor": 2.0, "type": "Laplace"}','{"renyi": [0.028273427804426782, 0.04178044821249171, 0.01934147939449867, 0.06804808859164681], "gaussian": 0.01570234854146456, "pure": "1/10", "delta": "0"}',NULL,NULL,1,'7f4abd28c8d66af7a73001b3f88c7be2c38a71743067fdfb7659c189d5363e28');
CREATE TABLE head (
    one INTEGER PRIMARY KEY CHECK (one = 1), entries INTEGER NOT NULL, hash TEXT NOT NULL
);
INSERT INTO "head" VALUES(1,3,'7f4abd28c8d66af7a73001b3f88c7be2c38a71743067fdfb7659c189d5363e28');
CREATE TABLE ledger (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    id TEXT NOT NULL, created TEXT NOT NULL,
    epsilon REAL, delta REAL, relation TEXT NOT NULL, unit TEXT NOT NULL
);
INSERT INTO "ledger" VALUES(1,'ef2d855666dd4248a22086ed10543d8f','2026-11-16T19:03:38.106+00:00',4.0,1.0e-05,'add_remove','record');
CREATE TABLE progress (
    plan INTEGER PRIMARY KEY REFERENCES entry (id),
    steps INTEGER NOT NULL, taken INTEGER NOT NULL CHECK (taken BETWEEN 0 AND steps)
);
CREATE TABLE total (
    partition TEXT PRIMARY KEY, entries INTEGER NOT NULL, cost TEXT NOT NULL
);
INSERT INTO "total" VALUES('',3,'{"renyi": [0.5033475034106667, 0.8796767447507738, 0.32346835038005195, 4060.8571026487343], "gaussian": null, "pure": null, "delta": "0"}');
CREATE TRIGGER ledger_is_fixed BEFORE UPDATE ON ledger
    BEGIN SELECT RAISE(ABORT, 'a ledger never changes its budget'); END;
CREATE TRIGGER entry_is_fixed BEFORE UPDATE ON entry
    BEGIN SELECT RAISE(ABORT, 'entries are append-only'); END;
CREATE TRIGGER entry_stays BEFORE DELETE ON entry
    BEGIN SELECT RAISE(ABORT, 'entries are append-only'); END;
COMMIT;