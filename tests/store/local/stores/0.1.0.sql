-- A database that safetune 0.1.0 (commit d703671) made; sqlite3.Connection.iterdump wrote it down.
PRAGMA application_id=1397118037;
PRAGMA user_version=3;
BEGIN TRANSACTION;
CREATE TABLE "_sqlite_migrations" (
   "id" INTEGER PRIMARY KEY,
   "migration_set" TEXT,
   "name" TEXT,
   "applied_at" TEXT
);
INSERT INTO "_sqlite_migrations" VALUES(1,'safetune','m001_create_tables','2026-11-22 12:39:29.096163+00:00');
INSERT INTO "_sqlite_migrations" VALUES(2,'safetune','m002_lease_and_choice_per_list','2026-11-22 12:39:29.098435+00:00');
INSERT INTO "_sqlite_migrations" VALUES(3,'safetune','m003_create_call','2026-11-22 12:39:29.107352+00:00');
CREATE TABLE "call" (
   "key" TEXT PRIMARY KEY,
   "name" TEXT,
   "place" TEXT,
   "arguments" TEXT,
   "created" REAL,
   "checksum" TEXT
);
INSERT INTO "call" VALUES('12121212121212121212121212121212','add','module:add','{"n":18446744073709551616}',1795262480.0,'ce2bb25048a220a98210bafc14866117');
CREATE TABLE "choice" (
   "key" TEXT,
   "generation" INTEGER,
   "config_digest" TEXT,
   "config" TEXT,
   "declared" TEXT,
   "median_ms" REAL,
   "measured" INTEGER,
   "created" REAL,
   "checksum" TEXT,
   PRIMARY KEY ("key", "declared", "generation")
);
INSERT INTO "choice" VALUES('487a4014bd92112998b0545faab0b7b8',1,'a507d44283006b9455f2c094f04d7edb','{"BLOCK":64,"num_ctas":1,"num_stages":3,"num_warps":4}','cdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcd',0.0125,2,1795262402.75,'8311656c94181e8f1f1c6060bacceb67');
INSERT INTO "choice" VALUES('487a4014bd92112998b0545faab0b7b8',2,'a0a0d8e9d59ba4142bdceb0d18e998aa','{"BLOCK":256,"num_ctas":1,"num_stages":3,"num_warps":4}','cdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcd',0.011,3,1795262461.0,'a001e7bf333838d005704913a1011c48');
INSERT INTO "choice" VALUES('487a4014bd92112998b0545faab0b7b8',1,'a507d44283006b9455f2c094f04d7edb','{"BLOCK":64,"num_ctas":1,"num_stages":3,"num_warps":4}','efefefefefefefefefefefefefefefef',0.0125,1,1795262470.0,'19d234181bf5e205e10cde6ed3da57c6');
CREATE TABLE "device" (
   "digest" TEXT PRIMARY KEY,
   "record" TEXT,
   "checksum" TEXT
);
INSERT INTO "device" VALUES('b103f2bc17211f5ab8bce37f05ac9b9f','{"capability":"90","name":"NVIDIA H100 80GB HBM3","shared_memory_bytes":232448,"sm_count":132}','c65c0738183e6e77630fae9fd9f514f9');
CREATE TABLE "kernel" (
   "digest" TEXT PRIMARY KEY,
   "name" TEXT,
   "source" TEXT,
   "file" TEXT,
   "line" INTEGER,
   "checksum" TEXT
);
INSERT INTO "kernel" VALUES('abababababababababababababababab','add','def add(x): ...','/src/add.py',12,'e588ae17529b675e89ef68a2119d6445');
CREATE TABLE "key" (
   "digest" TEXT PRIMARY KEY,
   "name" TEXT,
   "kernel" TEXT,
   "device" TEXT,
   "toolchain" TEXT,
   "call" TEXT,
   "checksum" TEXT
);
INSERT INTO "key" VALUES('487a4014bd92112998b0545faab0b7b8','add','abababababababababababababababab','b103f2bc17211f5ab8bce37f05ac9b9f','{"backend":"ptxas-12.8-90","environment":{"default_fp_fusion":"True"},"target":"cuda:90:32","triton":"3.6.0"}','{"dtypes":[["x","float16"]],"options":[["num_warps",4]],"values":[["N",18446744073709551616],["scale",-0.0],["label","\u00e9"]]}','3914609a77f571a5c589bbf2cc9a7b98');
CREATE TABLE lease (token INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT UNIQUE NOT NULL, owner TEXT NOT NULL, beats INTEGER NOT NULL);
CREATE TABLE "trial" (
   "key" TEXT,
   "generation" INTEGER,
   "config_digest" TEXT,
   "config" TEXT,
   "verdict" TEXT,
   "detail" TEXT,
   "message" TEXT,
   "stderr" TEXT,
   "median_ms" REAL,
   "p20_ms" REAL,
   "p80_ms" REAL,
   "count" INTEGER,
   "stage" TEXT,
   "gpu_uuid" TEXT,
   "marks" TEXT,
   "created" REAL,
   "checksum" TEXT,
   PRIMARY KEY ("key", "generation", "config_digest")
);
INSERT INTO "trial" VALUES('487a4014bd92112998b0545faab0b7b8',1,'a507d44283006b9455f2c094f04d7edb','{"BLOCK":64,"num_ctas":1,"num_stages":3,"num_warps":4}','ok','','','',0.0125,0.012,0.013,100,'final','GPU-1','["disputed: 2 of 3"]',1795262400.25,'0b48c02999d39d178b54624eb9458d5a');
INSERT INTO "trial" VALUES('487a4014bd92112998b0545faab0b7b8',1,'e3743b192eb1a65b4a2783725e351304','{"BLOCK":128,"num_ctas":1,"num_stages":3,"num_warps":4}','died','SIGSEGV','it died','core dumped
',NULL,NULL,NULL,NULL,NULL,'','[]',1795262401.5,'ed19cec099046e11cfd76b66cb8fcbd1');
INSERT INTO "trial" VALUES('487a4014bd92112998b0545faab0b7b8',2,'a0a0d8e9d59ba4142bdceb0d18e998aa','{"BLOCK":256,"num_ctas":1,"num_stages":3,"num_warps":4}','ok','','','',0.011,0.0105,0.012,100,'final','','[]',1795262460.0,'4f1d1461af5eb722a604437ae271ca31');
CREATE UNIQUE INDEX "idx__sqlite_migrations_migration_set_name"
    ON "_sqlite_migrations" ("migration_set", "name");
CREATE INDEX "idx_key_name"
    ON "key" ("name");
CREATE INDEX "idx_key_kernel_device"
    ON "key" ("kernel", "device");
DELETE FROM "sqlite_sequence";
COMMIT;
