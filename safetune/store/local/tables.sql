CREATE TABLE "_sqlite_migrations" (
   "id" INTEGER PRIMARY KEY,
   "migration_set" TEXT,
   "name" TEXT,
   "applied_at" TEXT
);
CREATE UNIQUE INDEX "idx__sqlite_migrations_migration_set_name"
    ON "_sqlite_migrations" ("migration_set", "name");
CREATE TABLE "kernel" (
   "digest" TEXT PRIMARY KEY,
   "name" TEXT,
   "source" TEXT,
   "file" TEXT,
   "line" INTEGER,
   "checksum" TEXT
);
CREATE TABLE "device" (
   "digest" TEXT PRIMARY KEY,
   "record" TEXT,
   "checksum" TEXT
);
CREATE TABLE "key" (
   "digest" TEXT PRIMARY KEY,
   "name" TEXT,
   "kernel" TEXT,
   "device" TEXT,
   "toolchain" TEXT,
   "call" TEXT,
   "checksum" TEXT
);
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
   "checksum" TEXT, judged INTEGER DEFAULT 0,
   PRIMARY KEY ("key", "generation", "config_digest")
);
CREATE TABLE "choice" (
   "key" TEXT,
   "generation" INTEGER,
   "config_digest" TEXT,
   "config" TEXT,
   "declared" TEXT,
   "median_ms" REAL,
   "measured" INTEGER,
   "created" REAL,
   "checksum" TEXT, origin TEXT NOT NULL DEFAULT '', marks TEXT DEFAULT '[]',
   PRIMARY KEY ("key", "declared", "generation")
);
CREATE TABLE "call" (
   "key" TEXT PRIMARY KEY,
   "name" TEXT,
   "place" TEXT,
   "arguments" TEXT,
   "created" REAL,
   "checksum" TEXT
);
CREATE INDEX "idx_key_name"
    ON "key" ("name");
CREATE INDEX "idx_key_kernel_device"
    ON "key" ("kernel", "device");
INSERT INTO _sqlite_migrations (migration_set, name, applied_at) VALUES
    ('safetune', 'm001_create_tables', strftime('%Y-%m-%d %H:%M:%f+00:00', 'now')),
    ('safetune', 'm004_drop_lease', strftime('%Y-%m-%d %H:%M:%f+00:00', 'now')),
    ('safetune', 'm005_add_origin_of_choice', strftime('%Y-%m-%d %H:%M:%f+00:00', 'now')),
    ('safetune', 'm006_add_judgement', strftime('%Y-%m-%d %H:%M:%f+00:00', 'now'))
