-- Two roles for a database of choices: jobs that tune connect as the writer, serving as the reader.
-- Run once in that database, as its owner: psql DATABASE -f postgres_roles.sql
-- Then give each a password (\password safetune_writer), or certificates in pg_hba.conf.
CREATE ROLE safetune_writer LOGIN;
CREATE ROLE safetune_reader LOGIN;
CREATE SCHEMA safetune AUTHORIZATION safetune_writer;
GRANT USAGE ON SCHEMA safetune TO safetune_reader;
ALTER DEFAULT PRIVILEGES FOR ROLE safetune_writer IN SCHEMA safetune
    GRANT SELECT ON TABLES TO safetune_reader;
